"""What a model keeps of a request, from its configuration: pages of attention, and states."""
