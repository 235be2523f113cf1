from fedlesam.cli import main

main()
