"""A simulator of Gaudi on the CPU, under the name of the vendor's package."""
