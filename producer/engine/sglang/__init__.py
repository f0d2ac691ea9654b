"""SGLang servers that the engine host starts, ends, and watches."""
