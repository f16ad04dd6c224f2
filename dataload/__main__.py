from dataload.cli import main

main()
