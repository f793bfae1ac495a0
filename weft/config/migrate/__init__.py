"""Other trainers: their names, weft's equivalents, and drafts of configs. Imports no torch.

All knowledge is in tables/, one table per trainer. The first look-up of a name reads the tables.
"""
