"""The service: stores measurements, judges commits, answers CI over REST."""
