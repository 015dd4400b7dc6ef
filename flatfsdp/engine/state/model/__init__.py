"""State dicts of models: what wrapped modules give and take under plain names. [Note: state dicts]"""
