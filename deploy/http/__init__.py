"""The HTTP service: what a run is doing, for people, programs and Prometheus, read from Redis."""
