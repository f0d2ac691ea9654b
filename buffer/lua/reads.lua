#!lua flags=no-writes
