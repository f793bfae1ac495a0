"""A run before it starts: what it will take, from the config and the model's shapes."""
