"""What sparse attention costs in quality: `watch` compares policies with dense attention, `needles` makes prompts."""
