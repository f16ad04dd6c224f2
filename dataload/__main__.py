from dataload.cli.app import main

main()
