"""The JAX side of jaxring: primitives and the functions that bind them. Import from `jaxring` instead."""
