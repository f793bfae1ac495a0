"""Other trainers: their names, what to write in weft instead, and drafts of their configs. Imports no torch.

What is known stands in tables/, one table for each trainer; nothing is read before a name asks for it.
"""
