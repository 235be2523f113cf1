"""Readers of the forms in which image data sets are stored; each turns files into arrays or says what is wrong."""
