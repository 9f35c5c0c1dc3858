"""What a run does and did: events put in order, shown live, as a trace, as a page, as metrics.  Decides nothing."""
