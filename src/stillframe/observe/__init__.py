"""Shows what a run does or did: its events in order, live, as a trace, as a page, as metrics.  Decides nothing."""
