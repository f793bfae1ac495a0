"""Other trainers: their names, weft's equivalents, and drafts of configs. Imports no torch.

All knowledge is in tables/, one table per trainer; nothing is read before a name is looked up.
"""
