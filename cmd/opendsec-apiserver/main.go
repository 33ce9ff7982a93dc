// Opendsec-apiserver runs one server; its configuration is the file that opendsec
// init writes as apiserver.json.
package main

import (
	"os"

	"github.com/kernflux/opendsec/internal/program"
	"github.com/kernflux/opendsec/internal/program/runapi"
)

func main() { os.Exit(program.Main(&runapi.Server{}, os.Args[1:])) }
