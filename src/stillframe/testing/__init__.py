"""For tests of stillframe and of what others build on it; imported by nothing else here."""
