"""Stand-in for IPython: only notebooks need the real one."""  # noqa: N999 - its name
