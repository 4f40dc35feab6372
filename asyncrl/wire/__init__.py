"""Message structs and the frame codec."""
