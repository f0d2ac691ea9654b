"""How processes reach machines and people: the `rollstream` command, local launcher, HTTP service, embedded Redis."""
