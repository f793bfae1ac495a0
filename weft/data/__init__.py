"""Data: converts rows to Documents with loss weights, and defines their order in optimizer steps."""
