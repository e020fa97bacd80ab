"""What sparse attention costs in quality: `compare` makes a table of policies and dense attention."""
