"""The tracer: one concrete run written as a torch.fx graph."""
