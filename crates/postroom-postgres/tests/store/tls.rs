//! TLS to a real PostgreSQL whose certificates a CA of the test's own has issued.

use postroom::StoreError;
use postroom_postgres::Connector;
use postroom_testkit::authority::Authority;
use postroom_testkit::services::PostgresServer;
use postroom_testkit::surroundings::{scratch, unique};

/// The whole of an error, as the command line shows it.
fn told(error: &StoreError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

async fn answer(url: &str) -> Result<bool, String> {
    let connector =
        Connector::new(url).map_err(|error| format!("{error}: {}", std::error::Error::source(&error).unwrap()))?;
    let client = connector.connect().await.map_err(|error| told(&error))?;
    let encrypted = "select ssl from pg_stat_ssl where pid = pg_backend_pid()";
    Ok(client.query_one(encrypted, &[]).await.map_err(|error| error.to_string())?.get(0))
}

#[tokio::test]
async fn certificates_are_verified_and_errors_name_the_option() {
    let certificates = scratch("authority");
    let ca = Authority::create(&certificates, "trusted_client");
    std::fs::create_dir(certificates.join("other")).unwrap();
    let other = Authority::create(&certificates.join("other"), "trusted_client");
    let server = PostgresServer::start(&scratch("encrypted").join(unique())).unwrap();
    let base = format!("postgres://postgres@127.0.0.1:{}/postgres", server.port());

    let refused = answer(&format!("{base}?sslmode=verify-full")).await.unwrap_err();
    assert!(refused.contains("offers no TLS") && refused.contains("sslmode=disable"), "{refused}");
    assert!(refused.contains(&format!("127.0.0.1:{}", server.port())), "{refused}");

    if server.sql("show ssl_library").unwrap().trim().is_empty() {
        eprintln!("this PostgreSQL was built without TLS; the rest is tested on the one that Debian has");
        return;
    }
    server.sql("create role trusted_client login").unwrap();
    server.encrypt(&ca.root, &ca.server.certificate, &ca.server.key, Some("trusted_client")).unwrap();
    let (root, other_root) = (ca.root.display(), other.root.display());
    // The reload takes a moment.
    while answer(&format!("{base}?sslrootcert={root}")).await.is_err_and(|error| error.contains("offers no TLS")) {
        tokio::task::yield_now().await;
    }
    assert_eq!(answer(&base).await, Ok(false), "on this machine nothing is asked for");
    assert_eq!(answer(&format!("{base}?sslrootcert={root}")).await, Ok(true));
    assert_eq!(answer(&format!("{base}?sslmode=verify-full&sslrootcert={root}")).await, Ok(true));
    assert_eq!(answer(&format!("{base}?sslmode=verify-ca&sslrootcert={root}&channel_binding=prefer")).await, Ok(true));
    for trusts_another in [format!("{base}?sslmode=verify-full"), format!("{base}?sslrootcert={other_root}")] {
        let refused = answer(&trusts_another).await.unwrap_err();
        assert!(refused.contains("sslrootcert="), "{refused}");
    }

    let by_certificate = base.replace("postgres@", "trusted_client@");
    let refused = answer(&format!("{by_certificate}?sslrootcert={root}")).await.unwrap_err();
    assert!(refused.contains("certificate"), "{refused}");
    let (certificate, key) = (ca.client.certificate.display(), ca.client.key.display());
    let url = format!("{by_certificate}?sslrootcert={root}&sslcert={certificate}&sslkey={key}");
    assert_eq!(answer(&url).await, Ok(true));

    server.encrypt(&ca.root, &ca.elsewhere.certificate, &ca.elsewhere.key, None).unwrap();
    let for_another_name = format!("{base}?sslrootcert={root}");
    let refused = loop {
        match answer(&for_another_name).await {
            Err(refused) => break refused,
            Ok(_) => tokio::task::yield_now().await,
        }
    };
    assert!(refused.contains("another name") && refused.contains("sslmode=verify-ca"), "{refused}");
    assert_eq!(answer(&format!("{base}?sslmode=verify-ca&sslrootcert={root}")).await, Ok(true));
    let refused = answer(&format!("{base}?sslmode=verify-ca&sslrootcert={other_root}")).await.unwrap_err();
    assert!(refused.contains("sslrootcert="), "any name, and not any issuer: {refused}");
}

#[test]
fn files_that_are_not_what_they_should_be_are_named() {
    let dir = scratch("authority");
    let ca = Authority::create(&dir, "c");
    let (root, key) = (ca.root.display(), ca.client.key.display());
    for (query, expected) in [
        ("sslrootcert=/nowhere.pem".to_owned(), "sslrootcert /nowhere.pem"),
        (format!("sslrootcert={key}"), "the file has no certificate in PEM"),
        (format!("sslcert={root}"), "one of them is missing"),
        (format!("sslcert={root}&sslkey={root}"), "sslkey "),
        ("sslmode=prefer".to_owned(), "would send the password"),
    ] {
        let error = Connector::new(&format!("postgres://u:s3cret@db/x?{query}")).unwrap_err();
        let told = format!("{error}: {}", std::error::Error::source(&error).unwrap());
        assert!(told.contains(expected) && !told.contains("s3cret"), "{told}");
    }
    let error = Connector::new("postgres://u:p@db:s3cr/x").unwrap_err();
    let told = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(told.contains("percent-encoded") && !told.contains("s3cr"), "{told}");
}
