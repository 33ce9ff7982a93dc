// Opendsec-iam runs one server; its configuration is the file that opendsec
// init writes as iam.json.
package main

import (
	"os"

	"github.com/kernflux/opendsec/internal/program"
)

func main() { os.Exit(program.Main(&program.IAM{}, os.Args[1:])) }
