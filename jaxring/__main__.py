from jaxring.cli.main import main

main()
