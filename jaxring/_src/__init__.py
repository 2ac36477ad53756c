"""The JAX side: primitives and the functions that bind them. Import from `jaxring` instead."""
