"""Measurements of images: photographs to read, and the decoder of `dataload.images`."""
