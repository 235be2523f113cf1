"""fedlesam on Flower."""
