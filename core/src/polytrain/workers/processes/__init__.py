"""How worker processes start: forked from a zygote, which is kept, preloaded, or spawned anew."""
