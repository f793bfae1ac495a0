"""Facts about stock models. No model code: the layers are transformers' own.

hf.py wraps transformers' internals. facts.py finds the parts of a model, families/ contains the few exceptions, and
train_module.py replaces the model's head by weft's. transforms.py and lora.py change modules.
"""
