"""The embedded engine: SGLang's native HTTP subset on a transformers causal LM, with continuous batching, for CPUs and tests."""
