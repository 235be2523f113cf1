from fedlesam.flower.client import client_app as client_app
from fedlesam.flower.strategy import Strategy as Strategy
