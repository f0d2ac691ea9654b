"""How a version's bytes get into one engine: one small interface, several ways. See `weightsync.transports.contract`."""
