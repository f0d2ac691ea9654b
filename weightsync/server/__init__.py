"""The weight server: a process that stages versions on a device and hands them to engines, by collective or by handle. The one part that needs torch."""
