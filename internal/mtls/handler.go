package mtls

import (
	"net/http"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/internal/fault"
)

// RoleOfRequest returns the role that the request's connection has shown and
// that was verified, "" for none.
func RoleOfRequest(r *http.Request) string {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		return ""
	}
	role, err := roleOfCert(r.TLS.VerifiedChains[0][0])
	if err != nil {
		return ""
	}
	return role
}

// Handler lets through what allow lists for the caller's role and refuses the
// rest, in the form that the caller's protocol has for errors.
func Handler(allow Allow, next http.Handler) http.Handler {
	refuse := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		role := RoleOfRequest(r)
		if allow.Allows(role, r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		err := fault.New(fault.PermissionDenied, "the role %q may not call %s", role, r.URL.Path)
		if refuse.IsSupported(r) {
			_ = refuse.Write(w, r, fault.ToConnect(err)) // the caller is gone
			return
		}
		http.Error(w, err.Error(), http.StatusForbidden)
	})
}
