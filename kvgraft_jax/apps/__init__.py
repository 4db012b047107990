"""Commands of the console script `kvgraft`, one thin module each."""
