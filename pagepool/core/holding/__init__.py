"""What requests and rows hold, and how they come to hold it."""
