"""The memory of a request in a model, from the model's configuration: pages of attention, and states."""
