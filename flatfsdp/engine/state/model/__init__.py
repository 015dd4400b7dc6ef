"""State dicts of models: values of wrapped modules under plain names, saved and loaded. [Note: state dicts]"""
