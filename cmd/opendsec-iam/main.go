// Opendsec-iam runs one server; its configuration is the file that opendsec
// init writes as iam.json.
package main

import (
	"os"

	"github.com/kernflux/opendsec/internal/program"
	"github.com/kernflux/opendsec/internal/program/runiam"
)

func main() { os.Exit(program.Main(&runiam.Server{}, os.Args[1:])) }
