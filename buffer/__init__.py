"""The staleness-aware buffer: ledger, batch journal, payload store, audit."""
