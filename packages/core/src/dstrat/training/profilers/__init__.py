"""Where the time of a run goes: profilers that the Trainer starts when it is asked to."""
