"""What keeper and manager say to each other: messages on the stream, and the folder both of them see."""
