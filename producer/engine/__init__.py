"""Engines: anything that speaks SGLang's native HTTP API, the client that drives them, and the host that runs one."""
