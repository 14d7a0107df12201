"""What ``self.log`` keeps, how it becomes the value of an epoch, and who reads it."""
