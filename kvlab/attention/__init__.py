"""The tensors behind the page numbers, and the backends that attend over them."""
