"""What weft knows of stock models. No model code: the layers are transformers' own.

hf.py wraps transformers' internals. facts.py finds the parts of a model, families/ holds the few exceptions, and
train_module.py puts weft's head in place of the model's. transforms.py and lora.py change modules.
"""
