"""The protocol between keeper and manager: the messages of the stream, and the workspace that both sides see."""
