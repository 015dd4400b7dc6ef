"""What the trainer takes by name: models, tokenizers and adapters of Hugging Face's libraries, and text to train on.

Each library is imported where a run needs it; a clear line names the extra that installs it.
"""
