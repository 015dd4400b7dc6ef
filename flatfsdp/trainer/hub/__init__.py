"""Objects that settings name: models, tokenizers and adapters of Hugging Face's libraries, and training text.

Each library is imported only where a run needs it; the error for a missing one names the extra that installs it.
"""
