"""weft in other programs.

autoload      entry point that torch loads in a job under `weft run --tune`
lightning     callback for Lightning
huggingface   callback for the Hugging Face Trainer
"""
