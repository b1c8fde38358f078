"""Why one site was decided as it was: what was seen, what each rule said, and the recorded graph around it."""
